"""instructor against an edge: `instructor_client.py EDGE`."""

import json
import sys
from typing import Any, Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

edge = sys.argv[1]
CHAT = (
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON_SCHEMA,
)


class Animal(BaseModel):
    """A person, as the model describes one."""

    animal: Literal["fox", "owl"]
    legs: Literal[2, 4]


def extracted(mode: instructor.Mode, **limit: int) -> Any:
    client: Any = instructor.from_openai(
        OpenAI(base_url=f"{edge}/v1", api_key="none", max_retries=0), mode=mode
    )
    animal = client.create(
        model="demo",
        response_model=Animal,
        messages=[{"role": "user", "content": "Tell me of an animal."}],
        max_retries=0,
        **limit,
    )
    return animal.model_dump()


told: dict[str, Any] = {mode.value: extracted(mode, max_tokens=150) for mode in CHAT}
told["responses_tools"] = extracted(instructor.Mode.RESPONSES_TOOLS, max_output_tokens=150)
print(json.dumps(told))
