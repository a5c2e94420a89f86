"""KV in 8 or 4 bits: the public path of `kvboost.kv.quantize`."""

from kvboost.kv.quantize import QuantizedKV, QuantizedLayer, dequantize_kv, quantize_kv

__all__ = ["QuantizedKV", "QuantizedLayer", "dequantize_kv", "quantize_kv"]
