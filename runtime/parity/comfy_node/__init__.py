"""ComfyUI custom nodes that record a run of MiniMax H3 into a golden of h3-blackwell-runtime.

Copy or link this folder into ComfyUI/custom_nodes (docs/capture.md). It stands alone: it imports
torch, safetensors and what ComfyUI hands it, nothing of the runtime.
"""

from .nodes import H3GoldenRecord, H3GoldenSave

NODE_CLASS_MAPPINGS = {"H3GoldenRecord": H3GoldenRecord, "H3GoldenSave": H3GoldenSave}
NODE_DISPLAY_NAME_MAPPINGS = {
    "H3GoldenRecord": "H3 golden: record",
    "H3GoldenSave": "H3 golden: save",
}
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
