"""Networks on tables: columns of a file, training by any rule, a model that predicts."""
