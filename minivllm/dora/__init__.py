"""DoRA: adapters that also have a length for every row of W + s B A. vLLM (v0.22.1) refuses them by name.

Brings      adapters with PEFT's `use_dora` (https://arxiv.org/abs/2402.09353) on linears, beside all others in a batch
Implements  an `AdapterOption` whose magnitudes stay as the file has them (`kept_beside`), and a `WrappedOption`: tables
            beside A and B in slots, and a forward hook of each linear
Options     `enable_dora`
Costs       some 260 lines, and N elements for every slot and linear. With the option a linear's output is scaled after
            its product, so that no kernel which reads outputs can add what adapters do (`forward_deferred`): on an
            H100 10 and 12 % of 32 and 128 decodes with 8 adapters, plain or not (docs/dora.md). To load an adapter
            takes a product of A with each weight, and the first one the norms of all rows. Without the option nothing
"""

from minivllm.dora.magnitudes import DoRA
from minivllm.extension import Extension

DORA = Extension({"options": (DoRA(),)})
