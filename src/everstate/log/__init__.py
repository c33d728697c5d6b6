"""The log: topics, producer, consumer, positions, lag. Home of confluent_kafka."""
