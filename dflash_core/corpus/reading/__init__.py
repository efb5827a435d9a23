"""Files and rows of chats in the formats that people have."""
