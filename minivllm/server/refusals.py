"""What is no part of this server: routes and fields of OpenAI's and vLLM's APIs, and the sentence that refuses each.

A request that is answered by something else than it asked for is worse than a refusal: a pooling request with an
adapter that the base model answers, say (docs/incidents.md).
"""

from collections.abc import Collection

GENERATES = "this server generates text, at /v1/completions and /v1/chat/completions"

# Beginning of a path -> what is asked for there. Each is 404, which clients do not retry; 501 they do.
ROUTES = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/v2/embed"), "Embeddings are"),
    **dict.fromkeys(("/pooling", "/classify", "/score", "/v1/score"), "Pooling, scores and classes are"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "Rankings are"),
    "/v1/responses": "Responses, which the server would have to keep, are",
    "/v1/messages": "Anthropic's messages are",
    "/v1/moderations": "Moderation is",
    "/v1/images": "Images are",
    "/v1/audio": "Audio is",
    **dict.fromkeys(("/v1/realtime", "/v1/videos"), "Audio and video are"),
    **dict.fromkeys(("/v1/assistants", "/v1/threads", "/v1/vector_stores"), "Assistants are"),
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/batches", "/v1/fine_tuning"), "Files and batches are"),
}

NO_TOOLS = "no model here calls tools; leave it out, or ask for JSON by response_format"
NO_MEDIA = "this server reads and writes text alone; leave it out"
# Field of a body -> why its value is refused.
FIELDS = {
    **dict.fromkeys(("tools", "tool_choice", "functions", "function_call"), NO_TOOLS),
    **dict.fromkeys(("modalities", "audio", "mm_processor_kwargs"), NO_MEDIA),
    "store": "this server keeps no answers; leave it out",
    "service_tier": "there is one tier; give auto or default, or leave it out",
    "priority": "requests are served in the order of --scheduling-policy; leave it out",
    "reasoning_effort": "no model here has efforts; give its template's own option in chat_template_kwargs",
    "chat_template": "a template is a program, and the server runs its own alone; pass --chat-template at its start",
    "best_of": "give n, and choose among the answers",
    **dict.fromkeys(
        ("use_beam_search", "length_penalty"),
        "answers are sampled; give temperature 0 for the likeliest tokens",
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "give structured_outputs, with json, regex, choice or grammar in it",
    ),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "give logit_bias"),
    "request_id": "give the header X-Request-Id",
    "prompt_logprobs": "logprobs are of answers; leave it out",
    "lora_int_id": "an adapter is known by its name; leave it out",
}


def of_path(path: str, paths: Collection[str]) -> str:
    """Why there is nothing at a path.   paths: those of the server's routes"""
    for begin, what in ROUTES.items():
        if path == begin or path.startswith(begin + "/"):
            return f"{what} not served here: {GENERATES}"
    if f"/v1{path}" in paths:
        return f"there is no route {path[:100]!a}, but /v1{path}; give clients the address with /v1"
    return f"there is no route {path[:100]!a}; /openapi.json lists those that there are"


def of_field(field: str | None) -> str | None:
    """Why a field, or its value, is refused; None for one that this server knows.   field: with dots inside objects"""
    name = (field or "").partition(".")[0]
    return f"'{name}' is not supported by this server: {FIELDS[name]}" if name in FIELDS else None
