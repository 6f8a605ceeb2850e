"""`embeddings.py EDGE TEXTS`: the vectors that litellm and langchain-openai make of the answers."""

import json
import sys

import litellm
from langchain_openai import OpenAIEmbeddings

edge, texts = sys.argv[1], json.loads(sys.argv[2])
answer = litellm.embedding("openai/model", input=texts, api_base=f"{edge}/v1", api_key="none")
# By itself langchain sends the ids of tokens as OpenAI's models have them.
embedder = OpenAIEmbeddings(
    model="model", base_url=f"{edge}/v1", api_key="none", check_embedding_ctx_length=False
)
said = {
    "litellm": [each["embedding"] for each in answer.data],
    "langchain": embedder.embed_documents(texts),
}
print(json.dumps(said))
