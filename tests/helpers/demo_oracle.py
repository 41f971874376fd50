"""transformers + PEFT on the demo model and its four adapters."""

import torch
from demo_tasks import NAMES, adapter_folder
from tiny_oracle import Oracle


class DemoOracle(Oracle):
    """In float32, with the four adapters and the model's own tokenizer."""

    def __init__(self, base, num_tokens):
        from transformers import AutoTokenizer

        super().__init__(base, torch.float32)
        self.num_tokens = num_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        for name in NAMES:
            self.load(name, adapter_folder(name))

    def generate(self, adapter, prompt):
        ids = self.tokenizer(prompt, return_tensors="pt")
        output = self.call(
            adapter, lambda model: model.generate(**ids, max_new_tokens=self.num_tokens, do_sample=False)
        )
        return output[0, ids["input_ids"].shape[1] :].tolist()

    def likeliest(self, adapter, prompt, tokens):
        """For every token of an answer: the one that is likeliest there, and by how much it leads the answer's.

        An answer all of whose tokens are likeliest is the greedy one: each was picked after the same tokens.
        """
        ids = self.tokenizer(prompt)["input_ids"]
        rows = self.logits(adapter, [ids + tokens])[0, len(ids) - 1 : -1]
        best = rows.max(-1)
        lead = best.values - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return best.indices.tolist(), lead.tolist()
