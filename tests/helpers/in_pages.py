"""B's of whole slots as kernels find them in pages: each page has NaN wherever no live rank is."""

import torch

from minivllm.gpu.kernels.paged_pieces import PagedPieces


def in_pages(b: list[torch.Tensor], ranks: torch.Tensor, page_ranks: int = 8) -> PagedPieces:
    """Pieces without A's, the pages dealt backwards.

    b      n x (S, N_i, R)
    ranks  (n, S) int32 live ranks
    """
    (slots, _, rank), heights = b[0].shape, tuple(one.shape[1] for one in b)
    pages_a_slot = -(-rank // page_ranks)
    count, stride = slots * pages_a_slot, page_ranks * sum(heights)
    pool = b[0].new_full((count, stride), torch.nan)
    table = torch.arange(count).flip(0).view(slots, pages_a_slot)
    firsts = [page_ranks * sum(heights[:i]) for i in range(len(b))]
    for one, first, of_slots in zip(b, firsts, ranks.tolist()):
        for slot, live in enumerate(of_slots):
            for page, rows in zip(table[slot], one[slot, :, :live].T.split(page_ranks)):
                pool[page, first : first + rows.numel()] = rows.flatten()
    of_pages = table.to(b[0].device, torch.int32), ranks, rank, page_ranks, stride, 1
    return PagedPieces(pool.flatten(), *of_pages, (0,) * len(b), tuple(firsts), (0,) * len(b), heights)
