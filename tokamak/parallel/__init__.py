"""How work and tensors spread over ranks."""
