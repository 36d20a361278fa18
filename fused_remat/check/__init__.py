"""Whether every op is right on this machine: gradients against finite differences, values against float64."""
