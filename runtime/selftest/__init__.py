"""`launch.py selftest`: whether every backend computes on this machine what its reference says."""
