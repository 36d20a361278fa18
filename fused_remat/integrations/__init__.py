"""Connections to other libraries, one module each; importing one imports its library only when it is used."""
