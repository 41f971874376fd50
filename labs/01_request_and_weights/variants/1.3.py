def scaling(self, module_name: str, rank: int) -> float:
    return self._scale(self.alpha(module_name), rank)

def alpha(self, module_name: str) -> float:
    for key, alpha in self.alpha_pattern.items():
        if self._matches(key, module_name):
            return alpha
    return self.lora_alpha

def _scale(self, alpha: float, rank: int) -> float:
    divisor = rank
    if self.use_rslora:
        divisor = rank**0.5
    return alpha / divisor

def _matches(self, key: str, module_name: str) -> bool:
    return self._patterns.match(r"(.*\.)?(" + key + ")$", module_name)
