"""langchain-openai against an edge: `langchain_client.py EDGE CHAT`."""

import json
import sys
from functools import reduce
from operator import add as joined
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel

edge = sys.argv[1]
chat: dict[str, Any] = json.loads(sys.argv[2])
prompt: str = chat.pop("messages")[0]["content"]
at: dict[str, Any] = {"base_url": f"{edge}/v1", "api_key": "none", "max_retries": 0}
model: Any = ChatOpenAI(**chat | at)
roomy: Any = ChatOpenAI(**chat | at | {"max_tokens": 300})
responding: Any = ChatOpenAI(
    model=chat["model"],
    max_tokens=chat["max_tokens"],
    extra_body={"seed": chat["seed"]},
    use_responses_api=True,
    **at,
)


class Animal(BaseModel):
    """The model's answer about an animal."""

    animal: Literal["fox", "owl"]
    legs: Literal[2, 4]


class add(BaseModel):  # noqa: N801  (the name of the tool)
    """Adds two digits."""

    a: Literal[1, 2, 3]
    b: Literal[1, 2, 3]


def refusal() -> list[object]:
    try:
        ChatOpenAI(**at, model="other").invoke(prompt)
    except Exception as error:  # noqa: BLE001  (whatever langchain makes of it is what is told)
        return [type(error).__name__, getattr(error, "status_code", None)]
    return []


whole = model.invoke(prompt)
chunks = list(model.stream(prompt, stream_usage=True))
streamed = reduce(joined, chunks)
response = responding.invoke(prompt)
of_events = reduce(joined, responding.stream(prompt))

calling = roomy.bind_tools([add], tool_choice="any", strict=True, parallel_tool_calls=False)
call = calling.invoke(prompt)
pieces = reduce(joined, calling.stream(prompt))

print(
    json.dumps(
        {
            "text": whole.content,
            "streamed": streamed.content,
            "chunks": len(chunks),
            "usage": [whole.usage_metadata, streamed.usage_metadata],
            "responses": [response.text, of_events.text],
            "structured": roomy.with_structured_output(Animal).invoke(prompt).model_dump(),
            "calls": [call.tool_calls, pieces.tool_calls],
            "refusal": refusal(),
        }
    )
)
