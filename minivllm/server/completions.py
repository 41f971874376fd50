"""POST /v1/completions, /v1/chat/completions, /tokenize and /detokenize.

Stands for vllm/entrypoints/openai/{completion,chat_completion}/api_router.py and vllm/entrypoints/serve/tokenize/
(v0.22.1).
"""

from functools import partial
from typing import Any

from starlette.responses import Response

from minivllm.lora.request import LoRARequest
from minivllm.server.context import Call, new_id
from minivllm.server.errors import ApiError
from minivllm.server.formatting import ChatFormatter, CompletionFormatter
from minivllm.server.generation import Generation, respond
from minivllm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from minivllm.server.routes import post


async def complete(body: CompletionRequest, call: Call) -> Response:
    """Continue one text or several, by the base model or an adapter."""
    adapter = await call.adapter(body.model, body.lora_mix)
    params = body.to_sampling_params()
    prompts, most = body.prompts(), call.server.settings.max_prompts
    if not 1 <= len(prompts) <= most:
        raise ApiError(400, f"prompt must be one to {most} prompts, got {len(prompts)}", "prompt")
    echoes: list[str] = []
    if body.echo:
        decode, run = (await call.tokenizer(adapter)).decode, call.server.llm.run_in_tokenizer_thread
        echoes = [
            prompt if isinstance(prompt, str) else await run(partial(decode, prompt["prompt_token_ids"]))
            for prompt in prompts
        ]
    formatter = CompletionFormatter(
        new_id("cmpl"), body.model, body.return_token_ids, echoes=echoes, n=params.n
    )
    return await respond(Generation(call, formatter.id, prompts, params, adapter, body), formatter)


async def chat(body: ChatRequest, call: Call) -> Response:
    """Answer a conversation, by the base model or an adapter."""
    adapter = await call.adapter(body.model, body.lora_mix)
    params = body.to_sampling_params()
    prompt = await chat_prompt(body, call, adapter)
    formatter = ChatFormatter(
        new_id("chatcmpl"), body.model, body.return_token_ids, top_logprobs=body.top_logprobs or 0
    )
    return await respond(Generation(call, formatter.id, [prompt], params, adapter, body), formatter)


async def chat_prompt(
    body: ChatRequest | TokenizeRequest, call: Call, adapter: LoRARequest | None
) -> dict[str, Any]:
    """The conversation of a body as a prompt."""
    messages = [message.for_template() for message in body.messages]
    options = {"add_generation_prompt": body.add_generation_prompt, **(body.chat_template_kwargs or {})}
    return await call.server.llm.chat_prompt(messages, adapter, options)


async def tokenize(body: TokenizeRequest, call: Call) -> dict[str, Any]:
    """Token ids of a text, or of a conversation in the model's template. The fields are vLLM's."""
    adapter = await call.adapter(body.model)
    llm = call.server.llm
    tokenizer = await call.tokenizer(adapter)
    longest = llm.config.model_config.max_model_len
    if body.messages is not None:
        ids = (await chat_prompt(body, call, adapter))["prompt_token_ids"]
    else:
        ids = await llm.tokenize("prompt", body.prompt, adapter, body.add_special_tokens)
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
    text = await call.server.llm.run_in_tokenizer_thread(lambda: tokenizer.decode(body.tokens))
    return {"prompt": text}


ROUTES = (
    post("/v1/completions", CompletionRequest, complete),
    post("/v1/chat/completions", ChatRequest, chat),
    post("/tokenize", TokenizeRequest, tokenize),
    post("/detokenize", DetokenizeRequest, detokenize),
)
