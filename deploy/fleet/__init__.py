"""Several engines behind one OpenAI server, by Ray Serve: `make serve-ray`, docs/deploy.md."""
