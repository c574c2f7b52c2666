"""What a model's answer holds besides text: reasoning and tool calls, found while it is made."""
