package meshrl

import (
	"encoding/binary"
	"fmt"
	"math"

	pb "meshrl.dev/api/meshrl/v1"
)

// Int32s are the elements of an INT32 tensor, in C order.
func Int32s(tensor *pb.Tensor) ([]int32, error) {
	data, err := elements(tensor, pb.DataType_DATA_TYPE_INT32, 4)
	values := make([]int32, len(data)/4)
	for i := range values {
		values[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return values, err
}

// Float32s are the elements of a FLOAT32 tensor, in C order.
func Float32s(tensor *pb.Tensor) ([]float32, error) {
	data, err := elements(tensor, pb.DataType_DATA_TYPE_FLOAT32, 4)
	values := make([]float32, len(data)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return values, err
}

// Bools are the elements of a BOOL tensor, in C order.
func Bools(tensor *pb.Tensor) ([]bool, error) {
	data, err := elements(tensor, pb.DataType_DATA_TYPE_BOOL, 1)
	values := make([]bool, len(data))
	for i := range values {
		values[i] = data[i] != 0
	}
	return values, err
}

func elements(tensor *pb.Tensor, dtype pb.DataType, width int64) ([]byte, error) {
	if tensor.GetDtype() != dtype {
		return nil, fmt.Errorf("a tensor has elements of %v, not %v", tensor.GetDtype(), dtype)
	}
	count := int64(1)
	for _, length := range tensor.Shape {
		count *= length
	}
	if int64(len(tensor.Data)) != count*width {
		return nil, fmt.Errorf("a tensor of shape %v has %d bytes, not %d", tensor.Shape, len(tensor.Data), count*width)
	}
	return tensor.Data, nil
}
