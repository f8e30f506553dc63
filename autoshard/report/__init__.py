"""What a plan looks like to people: `what` computes rows from a plan, `text` draws them."""
