"""What a traced model does with the data of its tensors, where one graph can hold it."""
