// The built-in kernels as one translation unit: linked statically, their registrations cannot be left out one by one.
#include "delay.cpp"
#include "echo.cpp"
#include "faces.cpp"
#include "lenet.cpp"
#include "scale.cpp"
#include "sockperf.cpp"
#include "spin.cpp"
