"""Pictures, videos and sounds in and out; torch only in references.py and tensors.py."""
