"""`fused-remat demo`: what is kept, dropped and redone, on an example small enough to follow by hand."""
