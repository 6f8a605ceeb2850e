"""Helpers of Anthropic's SDK against edges: `anthropic_helpers.py ADDER_EDGE DEMO_EDGE`.

The producer behind the first edge calls tools, and the model behind the second one fills a schema.
"""

import json
import sys

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel

adder, demo = (Anthropic(base_url=url, api_key="unused", max_retries=0) for url in sys.argv[1:3])


def add(numbers: list[int]) -> str:
    """Add numbers.

    Args:
        numbers: The numbers to add.
    """
    return str(sum(numbers))


def now() -> str:
    """Tell the time."""
    return "noon"


class Weather(BaseModel):
    """A schema for the model's answer."""

    town: str
    sunny: bool


def run(*, stream: bool) -> str:
    """Return the final text of a conversation in which the SDK runs the tools."""
    runner = adder.beta.messages.tool_runner(
        model="adder",
        max_tokens=2000,
        tools=[beta_tool(add), beta_tool(now)],
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        stream=stream,
    )
    text: str = runner.until_done().content[-1].text
    return text


parsed = demo.messages.parse(
    model="demo",
    max_tokens=300,
    messages=[{"role": "user", "content": "The weather?"}],
    output_format=Weather,
).parsed_output
print(json.dumps({"run": [run(stream=False), run(stream=True)], "parsed": parsed.model_dump()}))
