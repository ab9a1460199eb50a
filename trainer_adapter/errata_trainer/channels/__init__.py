"""The losses: functions of tensors, and what makes their tensors of rollouts. They know no trainer."""
