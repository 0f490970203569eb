"""Names of formats and of their files, known before the code that reads them is imported."""

OF_TORCH = "torch.distributed.checkpoint"
"""The name of its format."""
METADATA = ".metadata"
"""Its file that says what there is."""
OF_TORCH_SAVE = "torch.save"
"""The name of the format of ``torch.save``."""
SAFETENSORS = ".safetensors"
ENDINGS = (SAFETENSORS, ".pt", ".pth", ".bin", ".ckpt")
"""How files end that are opened by themselves."""
