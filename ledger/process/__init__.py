"""What every process of Tailrace needs: settings, logging, tasks, its start and its end."""
