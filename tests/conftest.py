"""What every test relies on."""

import torch

# Two cores: one thread a test leaves room for what else runs, and tiny models gain nothing from more.
torch.set_num_threads(1)
