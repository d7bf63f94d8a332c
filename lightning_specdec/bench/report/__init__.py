"""What results come to: figures of cells, advice, predictions, tables, pictures, and the page of them all."""
