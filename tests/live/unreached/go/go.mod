module heap

go 1.22
