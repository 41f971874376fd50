"""Programs around the engine that need the repository: no wheel has them. `minivllm demo` runs the one that is here."""
