"""The stages that ship with Tailrace."""
