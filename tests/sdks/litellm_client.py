"""litellm against two edges: `litellm_client.py EDGE OTHER CHAT TOOL`."""

import json
import sys
from typing import Any
from urllib.request import Request, urlopen

import litellm

edge, other = sys.argv[1:3]
chat: dict[str, Any] = json.loads(sys.argv[3]) | {"model": "openai/demo"}
tool: Any = json.loads(sys.argv[4])
at: dict[str, Any] = {"api_base": f"{edge}/v1", "api_key": "none", "max_retries": 0}
litellm.suppress_debug_info = True


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def stream_of(answer: Any) -> str:
    headers: dict[str, str] = answer._hidden_params["additional_headers"]
    return headers["llm_provider-tailrace-stream"]


def called(answer: Any) -> list[str]:
    choice = answer.choices[0]
    [call] = choice.message.tool_calls
    return [choice.finish_reason, call.id, call.function.name, call.function.arguments]


def refusal(**change: Any) -> list[object]:
    try:
        litellm.completion(**chat | at | change)
    except litellm.exceptions.APIError as error:
        return [type(error).__name__, error.status_code]
    except Exception as error:  # noqa: BLE001  (whatever litellm makes of it is what is told)
        return [type(error).__name__, getattr(error, "status_code", None)]
    return []


whole = litellm.completion(**chat, **at)
chunks = list(litellm.completion(**chat, **at, stream=True, stream_options={"include_usage": True}))

left = litellm.completion(**chat, **at, stream=True)
seen = text_of([next(left) for _ in range(5)])
left.completion_stream.close()  # left to the end, it makes CPython 3.13.5 crash there
with urlopen(f"{other}/v1/chat/completions/{stream_of(left)}?stream=true") as answer:
    events = [line.removeprefix(b"data: ") for line in answer if line.startswith(b"data: {")]
said = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
rest = "".join(delta.get("content", "") for delta in said)

endless = litellm.completion(
    **chat | at | {"max_tokens": 900}, stream=True, extra_body={"ignore_eos": True}
)
next(endless)
urlopen(Request(f"{other}/v1/generate/{stream_of(endless)}/cancel", method="POST")).close()
cancelled = None
try:
    list(endless)
except Exception as error:  # noqa: BLE001  (as above)
    cancelled = str(error)

asked = chat | at | {"tools": [tool], "tool_choice": "required", "max_tokens": 100}
asked["parallel_tool_calls"] = False
call = litellm.completion(**asked)
pieces = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))

print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "streamed": text_of(chunks),
            "usage": [whole.usage.model_dump(), chunks[-1].usage.model_dump()],
            "left": [seen, rest],
            "cancelled": cancelled,
            "calls": [called(call), called(pieces)],
            "refusals": [refusal(model="openai/other"), refusal(max_tokens=0)],
        }
    )
)
