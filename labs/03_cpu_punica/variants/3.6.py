def linear(self, x: torch.Tensor, base: LinearBase, slots: Slots) -> torch.Tensor:
    y, _ = base.forward(x)
    if self.no_lora:
        return y
    if x.dtype == slots.a[0].dtype:
        for slot, rows in self.runs:
            for columns, a, b in slots.live(slot):
                y[rows][:, columns].addmm_(x[rows] @ a, b)
    else:
        self.add(y, x, slots, self.token_rows(x.shape[0]))
    return y
