"""An agent as people write them with openai-agents: one tool, one run."""

import subprocess
import sys

from agents import Agent, Runner, function_tool


@function_tool
def bash(command: str) -> str:
    """Run a shell command in the repository."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


agent = Agent(name="mender", instructions="You fix bugs.", model=sys.argv[2], tools=[bash])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
