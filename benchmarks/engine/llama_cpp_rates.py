"""How fast does llama.cpp run this model file here? One JSON line per request line read from stdin.

Runs in any Python that has llama-cpp-python; it needs nothing of Tokamak, so it may live in another
environment. Protocol: arguments MODEL THREADS MAX_SEQUENCES; then each line of stdin is
`prefill TOKENS` or `decode SEQUENCES PROMPT_TOKENS STEPS`, and each line of stdout one JSON object with
`seconds` and `tokens`. Sampling is left out (random token ids are fed), which is in llama.cpp's favour.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time

import llama_cpp


def quiet_log() -> object:
    """Drop llama.cpp's log lines; the returned callback must stay alive."""

    @llama_cpp.llama_log_callback
    def drop(level: int, text: bytes, data: ctypes.c_void_p) -> None:
        del level, text, data

    llama_cpp.llama_log_set(drop, ctypes.c_void_p(0))
    return drop


def fill(batch: llama_cpp.llama_batch, entries: list[tuple[int, int, int, bool]]) -> None:
    """Put (token, position, sequence, wants logits) rows in a batch."""
    batch.n_tokens = len(entries)
    for at, (token, position, sequence, wanted) in enumerate(entries):
        batch.token[at] = token
        batch.pos[at] = position
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = wanted


def decode(context: ctypes.c_void_p, batch: llama_cpp.llama_batch) -> None:
    """Run one batch; a failure ends the program."""
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise SystemExit(f"llama_decode returned {status}")


def main() -> None:
    """Load the model once, then answer lines of stdin."""
    model_path, threads, sequences = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    keep = quiet_log()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(
        model_path.encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = 256 * sequences if sequences > 4 else 1024
    params.n_batch = 2048
    params.n_ubatch = 512
    params.n_seq_max = sequences
    params.n_threads = threads
    params.n_threads_batch = threads
    params.kv_unified = sequences == 1
    params.flash_attn_type = 1
    context = llama_cpp.llama_init_from_model(model, params)
    memory = llama_cpp.llama_get_memory(context)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(2048, 0, 1)
    rng = random.Random(0)
    for line in sys.stdin:
        words = line.split()
        llama_cpp.llama_memory_clear(memory, False)
        if words[0] == "prefill":
            tokens = int(words[1])
            fill(
                batch,
                [(rng.randrange(vocabulary), at, 0, at == tokens - 1) for at in range(tokens)],
            )
            begun = time.perf_counter()
            decode(context, batch)
            llama_cpp.llama_synchronize(context)
            answer = {"seconds": time.perf_counter() - begun, "tokens": tokens}
        else:
            rows, prompt, steps = (int(word) for word in words[1:4])
            for row in range(rows):
                fill(batch, [(rng.randrange(vocabulary), at, row, False) for at in range(prompt)])
                decode(context, batch)
            times = []
            for step in range(steps):
                fill(
                    batch,
                    [(rng.randrange(vocabulary), prompt + step, row, True) for row in range(rows)],
                )
                begun = time.perf_counter()
                decode(context, batch)
                llama_cpp.llama_synchronize(context)
                times.append(time.perf_counter() - begun)
            answer = {
                "seconds": sum(times),
                "tokens": rows * steps,
                "median_step": sorted(times)[steps // 2],
            }
        print(json.dumps(answer), flush=True)
    del keep


if __name__ == "__main__":
    main()
