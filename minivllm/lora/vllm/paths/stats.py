"""Where counters used to be: see `minivllm.lora.reports`. Nothing in vllm/lora/ (v0.22.1) counts."""


def __getattr__(name: str) -> object:
    from minivllm.lora import reports

    return getattr(reports, name)
