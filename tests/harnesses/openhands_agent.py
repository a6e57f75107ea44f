"""An agent as people write them with the OpenHands SDK: its terminal tool, one conversation."""

import os
import sys

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(model=f"openai/{sys.argv[2]}", base_url=os.environ["OPENAI_BASE_URL"],
          api_key=SecretStr(os.environ["OPENAI_API_KEY"]), usage_id="agent")
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.getcwd())
conversation.send_message(sys.argv[1])
conversation.run()
