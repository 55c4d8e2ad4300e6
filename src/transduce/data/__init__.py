"""Files of pairs enter; examples, tokens and batches leave."""
