"""What makes and grades the labs. The engine knows nothing of it."""
