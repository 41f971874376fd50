"""Who is kept, who goes first, what is read ahead, which engine gets a request. vLLM (v0.22.1) has one answer each."""
