"""The commands of `lab`, by what they are about; `labs.kit.cli` lists them."""
