from protocols import Usage as Usage
