"""POST /tokenize and /detokenize. Stands for vllm/entrypoints/serve/tokenize/ (v0.22.1)."""

from typing import Any

from minivllm.server.context import Call
from minivllm.server.errors import ApiError
from minivllm.server.protocol import DetokenizeRequest, TokenizeRequest
from minivllm.server.routes import post
from minivllm.text.prompts import tokenize as tokenized


async def tokenize(body: TokenizeRequest, call: Call) -> dict[str, Any]:
    """Token ids of a text, or of a conversation in the model's template. The fields are vLLM's."""
    adapter = await call.adapter(body.model)
    llm = call.server.llm
    tokenizer = await call.tokenizer(adapter)
    longest = llm.config.model_config.max_model_len
    if body.messages is not None:
        messages = [message.as_template_takes_it() for message in body.messages]
        ids = (await llm.chat_prompt(messages, adapter))["prompt_token_ids"]
    else:
        special = body.add_special_tokens
        ids = await llm.beside(
            lambda: tokenized("prompt", body.prompt, tokenizer, longest, add_special_tokens=special)
        )
    texts = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": texts}


async def detokenize(body: DetokenizeRequest, call: Call) -> dict[str, str]:
    """The text of token ids."""
    adapter = await call.adapter(body.model)
    tokenizer = await call.tokenizer(adapter)
    if wrong := [token for token in body.tokens if token >= len(tokenizer)]:
        raise ApiError(
            400, f"tokens {wrong[:5]} are unknown; use ids from 0 to {len(tokenizer) - 1}", "tokens"
        )
    return {"prompt": await call.server.llm.beside(lambda: tokenizer.decode(body.tokens))}


ROUTES = (post("/tokenize", TokenizeRequest, tokenize), post("/detokenize", DetokenizeRequest, detokenize))
