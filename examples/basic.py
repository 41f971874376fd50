"""One adapter: configure an engine part by part, load the adapter, ask it and the base model the same question."""

from examples.common import GREEDY, QUESTIONS, adapter, chat, finish
from minivllm import LLMEngine
from minivllm.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig
from minivllm.models.demo_model import demo_model_path
from minivllm.text.prompts import load_tokenizer


def main() -> dict[str, str]:
    config = EngineConfig(
        model_config=ModelConfig(demo_model_path(), max_model_len=512),
        cache_config=CacheConfig(),
        scheduler_config=SchedulerConfig(max_num_seqs=16),
        lora_config=LoRAConfig(max_loras=4, max_lora_rank=16, max_cpu_loras=32),
        device="auto",
    )
    engine = LLMEngine(config, load_tokenizer(config.model_config))
    lora_request = adapter("sql")
    engine.model_runner.add_lora(lora_request)

    prompt = chat(engine, QUESTIONS["sql"])
    engine.add_request("with the adapter", prompt, GREEDY, lora_request=lora_request)
    engine.add_request("without", prompt, GREEDY)
    answers = {request_id: output.outputs[0].text for request_id, output in finish(engine).items()}
    for request_id, answer in answers.items():
        print(f"{request_id}: {answer}")
    return answers


if __name__ == "__main__":
    main()
