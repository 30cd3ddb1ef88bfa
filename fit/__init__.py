"""What the losses of a sweep say: the joint law, φ and its interval."""
