"""The engine behind OpenAI's HTTP API. vLLM: vllm/entrypoints/openai.

Brings      completions and chats as streams, adapters as models, metrics, a live page. With 128 streams over 8
            adapters of a Llama-8B shape on an H100 it made 96 % of the tokens a second of the engine alone, and first
            tokens came 53 ms later (server-h100-2026-11-22.json)
Implements  an ASGI application around `minivllm.serving.AsyncLLM`; nothing of the engine's
Options     those of `ServerSettings`: `minivllm serve --help`
Costs       some 2,700 lines, and Starlette, uvicorn and prometheus_client (`pip install 'minivllm[serve]'`)
"""
