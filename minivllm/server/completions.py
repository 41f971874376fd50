"""POST /v1/completions and /v1/chat/completions.

Stands for vllm/entrypoints/openai/{completion,chat_completion}/api_router.py (v0.22.1).
"""

from collections.abc import Sequence

from starlette.responses import Response

from minivllm.engine.input_processor import Prompt
from minivllm.lora.request import LoRARequest
from minivllm.server.context import Call, new_id
from minivllm.server.errors import ApiError
from minivllm.server.forms import ChatForm, CompletionForm
from minivllm.server.protocol import ChatRequest, CompletionRequest, SamplingFields
from minivllm.server.respond import respond
from minivllm.server.routes import post
from minivllm.server.sampling import chat_params, completion_params


async def complete(body: CompletionRequest, call: Call) -> Response:
    """Continue one text or several, by the base model or an adapter."""
    adapter = await call.adapter(body.model)
    params = completion_params(body)
    prompts = prompts_of(body, call.server.settings.max_prompts)
    echoes = await texts_of(call, prompts, adapter) if body.echo else ()
    form = CompletionForm(new_id("cmpl"), body.model, body.return_token_ids, echoes=echoes, n=params.n)
    generation = call.generation(form.id, prompts, params, adapter)
    return await respond(call.receive, generation, form, body.stream, include_usage(body))


async def chat(body: ChatRequest, call: Call) -> Response:
    """Answer a conversation, by the base model or an adapter."""
    adapter = await call.adapter(body.model)
    params = chat_params(body)
    messages = [message.as_template_takes_it() for message in body.messages]
    prompt = await call.server.llm.chat_prompt(messages, adapter)
    form = ChatForm(
        new_id("chatcmpl"), body.model, body.return_token_ids, top_logprobs=body.top_logprobs or 0
    )
    generation = call.generation(form.id, [prompt], params, adapter)
    return await respond(call.receive, generation, form, body.stream, include_usage(body))


def include_usage(body: SamplingFields) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def prompts_of(body: CompletionRequest, most: int) -> list[Prompt]:
    """One or several prompts as a list; token ids in the form that the engine takes. ApiError 400 for none."""
    given = body.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not 1 <= len(given) <= most:
        raise ApiError(400, f"prompt must be one to {most} prompts, got {len(given)}", "prompt")
    return [prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in given]


async def texts_of(call: Call, prompts: Sequence[Prompt], adapter: LoRARequest | None) -> list[str]:
    """The prompts as text, for `echo`. ApiError 400 for a server of token ids only."""
    llm, decode = call.server.llm, (await call.tokenizer(adapter)).decode
    return [
        prompt
        if isinstance(prompt, str)
        else await llm.beside(lambda ids=prompt["prompt_token_ids"]: decode(ids))
        for prompt in prompts
    ]


ROUTES = (
    post("/v1/completions", CompletionRequest, complete),
    post("/v1/chat/completions", ChatRequest, chat),
)
