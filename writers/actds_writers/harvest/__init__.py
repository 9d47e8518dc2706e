"""A harvest from start to seal: run, resume, recover, canaries, live serving."""
