"""A stream from a running server, with the standard library alone: `python examples/client.py [URL]`."""

import json
import sys
import urllib.request


def main(url: str = "http://127.0.0.1:8000") -> None:
    """Print an answer as it comes."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
        "temperature": 0,
        "max_tokens": 20,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    print(choice["delta"].get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
