"""An engine among threads and event loops."""
