"""What `launch.py bench` measures, one subject a process (`python -m runtime.bench`)."""
