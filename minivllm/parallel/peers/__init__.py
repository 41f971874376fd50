"""Sums in each other's memory, into which GPUs of one host write: of few rows, most of NCCL's time is latency.

Stands for vllm/distributed/device_communicators/custom_all_reduce.py (v0.22.1).

Brings      on two H200, rows of 4,096 in bfloat16: a sum of 1, 32 and 128 of them takes 2.5, 3.7 and 6.1 us behind its
            product, NCCL's 6.7, 8.8 and 14.3. Tokens a second of 1, 32 and 128 requests of a Llama-8B shape: 350,
            10,202 and 34,508, where terms were sent with counts (e9fad465) 343, 10,044 and 32,858. On two H100 an
            engine that still fetched terms had 8 to 16 % more than with NCCL's sums, 3 to 5 % of it by a sum and the
            norm behind it in one kernel, which adds what adapters add to o and down, too (docs/tensor-parallel.md)
Implements  `PeerGroup` is a `ProcessGroup` that takes small sums and gathers itself and leaves all others to
            torch.distributed: `all_reduce`, `all_gather`, `look_up_own`. It has `add_and_norm` and
            `add_adapters_and_norm` besides, which fused blocks ask for (`minivllm.gpu.fused.blocks.SumsInNorms`).
            `minivllm.parallel.ranks.make_group` alone knows this folder: without the folder, its import there and its
            two lines NCCL takes every sum
Options     `disable_custom_all_reduce`
Costs       some 690 lines, and 17 MB of each GPU. At the start all kinds of sums are tried beside NCCL's, and where any
            is wrong, or memory cannot be shared, NCCL takes all. A rank that waits for one that has ended must be let
            go by a number in the host's memory (`release`). On more than two GPUs nothing was measured
"""
