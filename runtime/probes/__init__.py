"""What this machine can run: one file per kind of backend, each tried on every device."""
